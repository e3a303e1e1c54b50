"""What the demo and the quality benchmark run on: a small real model and long real prose."""

"""What compression costs in quality: retrieval tasks, exact match, perplexity.

Nothing here knows kvd: a model, a tokenizer, a text and a cache come in, figures come out.
"""

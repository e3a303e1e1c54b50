"""The gRPC side: messages in, the engine's answer out. Only here and in `attach` is protobuf known."""

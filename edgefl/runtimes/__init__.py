"""Runtimes: interpreters of node programs. `virtual` supplies a virtual clock, `grpc` real sockets."""

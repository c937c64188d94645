"""What the benchmarks share: interleaved measurements, tables, and plain alternatives."""

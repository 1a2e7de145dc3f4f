"""Benchmarks measure CPU time of the calling thread, since other work may share the machine."""

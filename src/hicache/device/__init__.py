"""Device pools: the only place that knows how an engine holds its tensors. Importing it imports no torch."""

"""The reference engine: transformers models with continuous batching; the same tokens with the cache and without it."""

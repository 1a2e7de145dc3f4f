"""Pages on a Valkey or Redis server, or on a cluster of them."""

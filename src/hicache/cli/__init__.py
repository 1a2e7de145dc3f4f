"""The `hicache` command: it parses, hands over to the library, and prints; nothing is decided here."""

"""Pages in the pooled memory of a Mooncake Store, moved straight from and into registered host memory."""

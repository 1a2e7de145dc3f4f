"""Pages as files that NIXL reads and writes, straight from and into registered host memory."""

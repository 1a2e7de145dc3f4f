"""Equal seeds run equally: the real scheduler and cache on a machine of numbers, with a virtual clock."""

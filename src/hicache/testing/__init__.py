"""Suites, wrappers and simulators for tests of hicache and of what others plug into it; nothing else imports it."""

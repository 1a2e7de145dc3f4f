"""`python -m hicache` is the `hicache` command."""

import sys

from hicache.cli.main import main

sys.exit(main())

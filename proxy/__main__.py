"""`python -m proxy` is `recap`."""

import sys

from proxy.cli import main

sys.exit(main())

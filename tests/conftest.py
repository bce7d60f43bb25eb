"""Settings that must stand before torch is imported: spinning threads slow each other on busy cores."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

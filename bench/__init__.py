"""asv's view of what `shardbench run` measured: one module a quantity, one class a model.

asv imports this package in whatever environment it was given; the folder above holds `harness`, installed or not.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

"""What holds for every test: no network, no hub, and nothing inherited that would change what a rank computes."""

from __future__ import annotations

import os

# Before any test imports transformers or huggingface_hub, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

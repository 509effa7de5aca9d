"""The bundled model: a 3.8M-parameter Llama that adds, subtracts, sorts, reverses and compares.

`FOLDER` is an ordinary Hugging Face folder, written by tools/train_abacus.py; `problems`
generates the questions it was trained on and the held-out ones that measure it.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent

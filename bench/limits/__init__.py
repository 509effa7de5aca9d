"""``bench limits``: what bounds a step, beside what was measured, and its picture."""

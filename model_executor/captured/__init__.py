"""Models of ``transformers`` that have no adapter here."""

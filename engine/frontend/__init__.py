"""The text side: tokenizer, chat template, checks of prompts, detokenizer and stop strings."""

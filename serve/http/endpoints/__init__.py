"""A module an endpoint, and what they share: reading a body, making prompts and sampling of it, and
writing the outputs as an answer or a stream."""

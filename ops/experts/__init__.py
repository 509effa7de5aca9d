"""Mixtures of experts: routing, grouped linear layers, and what joins them."""

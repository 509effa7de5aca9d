"""This room has what every op is made of: descriptions, implementations, launches, compiled
variants and the tables of a GPU.
"""

"""The model: its layers, the families of models, and the weights that fill them."""

"""The formats of training engines and model libraries, each on its own."""

"""Training of multimodal models in which every module has its own parallelism."""

//! Llama-type models from the folders of model hubs, as stages of a pipeline.

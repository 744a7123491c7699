"""Sources, conversations, self-distillation and token ids: the first stage."""

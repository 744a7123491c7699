"""What tests share: tiny models and tokenizers, references written from the papers, fakes of servers and engines."""

"""Parts of supervised fine-tuning: its settings, and what watches over it."""

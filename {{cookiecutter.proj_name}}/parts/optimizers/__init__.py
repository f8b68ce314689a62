"""Several optimizers in one run, such as Muon for matrices and AdamW for the rest."""

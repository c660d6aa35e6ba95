"""Ground floor: errors, ids, processes, secrets, arithmetic. Knows no word of training."""

"""`rollout ui`: runs, comparisons, samples, rollouts and models in the browser; it reads and changes nothing."""

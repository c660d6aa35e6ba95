"""From a cloud's queue (SQS, Pub/Sub) into the store's: a rollout for each message, acknowledged once it is stored."""

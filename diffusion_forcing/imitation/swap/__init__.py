"""The paper's task: an arm swaps two fruits by way of a third plate, and must remember where they were."""

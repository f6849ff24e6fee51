"""What only the recipe of PPO needs; nothing else imports it."""

"""What runs beside the private records: private fine-tuning, and one release."""

"""What client and server must agree on: configuration, formats, mechanism, accounting, assets, model."""

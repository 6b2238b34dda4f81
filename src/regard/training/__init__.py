"""Statistics of every head while a model trains: the monitor, its table, alarms and callbacks."""

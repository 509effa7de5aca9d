"""What comes in: connections and their limits, host names, the bodies and how they are parsed; and
the errors that answer what is refused."""

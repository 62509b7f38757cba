"""How each rule is tried: functions that it must recognise, and functions that it must refuse with a reason."""

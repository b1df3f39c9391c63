// rotary

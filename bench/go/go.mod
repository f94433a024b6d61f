module bench

go 1.25

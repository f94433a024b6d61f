// Channels, select and locks.
package main

import "sync"

const (
	trips     = 10_000 // round trips a round
	items     = 100_000
	itemsSum  = items * (items - 1) / 2
	slots     = 128
	parties   = 4 // senders, receivers, channels of a select; producers with a consumer each
	ringNodes = 1_000
	ringHops  = 20_000 // of a round, at least; whole laps
	primes    = 2_000
	lastPrime = 17_389
	lockers   = 8
	locksEach = 20_000
)

// pingPong has an echo on the other side of two unbuffered channels.
func pingPong(a args) report {
	ping, pong := make(chan int), make(chan int)
	go func() {
		for v := range ping {
			pong <- v + 1
		}
	}()
	m := newMeter(a, trips)
	for m.anotherRound() {
		for i := range trips {
			ping <- i
			check(<-pong == i+1)
		}
	}
	return m.report()
}

func spsc(a args) report {
	m := newMeter(a, items)
	for m.anotherRound() {
		ch := make(chan int, slots)
		go func() {
			for i := range items {
				ch <- i
			}
			close(ch)
		}()
		sum := 0
		for v := range ch {
			sum += v
		}
		check(sum == itemsSum)
	}
	return m.report()
}

func mpmc(a args) report {
	m := newMeter(a, items)
	for m.anotherRound() {
		ch := make(chan int, slots)
		var sending, receiving sync.WaitGroup
		sums := make(chan int, parties)
		for s := range parties {
			sending.Go(func() {
				for i := s; i < items; i += parties {
					ch <- i
				}
			})
			receiving.Go(func() {
				sum := 0
				for v := range ch {
					sum += v
				}
				sums <- sum
			})
		}
		sending.Wait()
		close(ch)
		receiving.Wait()
		sum := 0
		for range parties {
			sum += <-sums
		}
		check(sum == itemsSum)
	}
	return m.report()
}

// selects takes from four channels, each with a sender of its own.
func selects(a args, slots int) report {
	m := newMeter(a, items)
	for m.anotherRound() {
		var ch [parties]chan int
		for s := range ch {
			ch[s] = make(chan int, slots)
			go func() {
				for i := s; i < items; i += parties {
					ch[s] <- i
				}
			}()
		}
		c0, c1, c2, c3 := ch[0], ch[1], ch[2], ch[3]
		sum := 0
		for range items {
			select {
			case v := <-c0:
				sum += v
			case v := <-c1:
				sum += v
			case v := <-c2:
				sum += v
			case v := <-c3:
				sum += v
			}
		}
		check(sum == itemsSum)
	}
	return m.report()
}

// ring sends one token round: each node takes one off it and passes it on.
func ring(a args) report {
	nodes := a.number("n", ringNodes)
	done := make(chan struct{})
	first := make(chan int)
	in := first
	for i := range nodes {
		out := first
		if i < nodes-1 {
			out = make(chan int)
		}
		go func(in <-chan int, out chan<- int) {
			for v := range in {
				if v == 0 {
					done <- struct{}{}
				} else {
					out <- v - 1
				}
			}
		}(in, out)
		in = out
	}
	hops := (ringHops + nodes - 1) / nodes * nodes
	m := newMeter(a, hops)
	for m.anotherRound() {
		first <- hops
		<-done
	}
	return m.report()
}

// sieve finds primes by a chain of goroutines, one for each prime found.
func sieve(a args) report {
	m := newMeter(a, 1)
	for m.anotherRound() {
		in := make(chan int)
		go func(out chan<- int) {
			for n := 2; n <= lastPrime; n++ {
				out <- n
			}
			close(out)
		}(in)
		found, last := 0, 0
		for {
			prime, more := <-in
			if !more {
				break
			}
			found, last = found+1, prime
			out := make(chan int)
			go func(in <-chan int, out chan<- int) {
				for n := range in {
					if n%prime != 0 {
						out <- n
					}
				}
				close(out)
			}(in, out)
			in = out
		}
		check(found == primes && last == lastPrime)
	}
	return m.report()
}

func mutexes(a args) report {
	m := newMeter(a, lockers*locksEach)
	for m.anotherRound() {
		var lock sync.Mutex
		var wg sync.WaitGroup
		count := 0
		for range lockers {
			wg.Go(func() {
				for range locksEach {
					lock.Lock()
					count++
					lock.Unlock()
				}
			})
		}
		wg.Wait()
		check(count == lockers*locksEach)
	}
	return m.report()
}

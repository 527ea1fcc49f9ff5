package cli

import (
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// A command that takes longer than quietTime shows what it does.
	quietTime = time.Second
	// A terminal's line is rewritten this often; elsewhere a line is added this often.
	terminalInterval = time.Second
	logInterval      = 10 * time.Second
)

// progress shows on stderr what a command waits for.
type progress struct {
	out      io.Writer
	terminal bool
	start    time.Time

	mu     sync.Mutex
	what   string
	drawn  bool
	ended  bool
	finish chan struct{}
	done   chan struct{}
}

func newProgress(out io.Writer, terminal bool, what string) *progress {
	p := &progress{
		out: out, terminal: terminal, what: what, start: time.Now(), finish: make(chan struct{}),
		done: make(chan struct{}),
	}
	go p.run()
	return p
}

func (p *progress) run() {
	defer close(p.done)
	timer := time.NewTimer(quietTime)
	defer timer.Stop()
	for {
		select {
		case <-p.finish:
			return
		case <-timer.C:
			p.draw()
			if p.terminal {
				timer.Reset(terminalInterval)
			} else {
				timer.Reset(logInterval)
			}
		}
	}
}

func (p *progress) draw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	took := time.Since(p.start).Round(time.Second)
	if p.terminal {
		fmt.Fprintf(p.out, "\r\x1b[K… %s (%s)", p.what, took)
		p.drawn = true
		return
	}
	fmt.Fprintf(p.out, "… %s (%s)\n", p.what, took)
}

// now changes what is shown.
func (p *progress) now(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.what = what
}

// note writes a line that stays, such as a change of status, with the time since the start.
func (p *progress) note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clearLine()
	fmt.Fprintf(p.out, "%6.1fs  %s\n", time.Since(p.start).Seconds(), printable(text))
}

// stop ends it and clears its line; it may be called again.
func (p *progress) stop() {
	p.mu.Lock()
	first := !p.ended
	p.ended = true
	p.clearLine()
	p.mu.Unlock()
	if first {
		close(p.finish)
		<-p.done
	}
}

func (p *progress) clearLine() {
	if p.drawn {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.drawn = false
	}
}

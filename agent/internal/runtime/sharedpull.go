package runtime

import "context"

// sharedPull is one pull of an image for all callers that wait for the image. It ends when the last of them leaves: a
// tenant that changes its mind often would otherwise have many pulls at the same time.
type sharedPull struct {
	// done is closed when the pull has ended, with err.
	done chan struct{}
	err  error
	// callers counts those that wait. Without any, the pull is being cancelled. Runtime.mu guards it.
	callers int
	cancel  context.CancelFunc
}

// sharePull waits for the pull of an image. It starts the pull unless one is under way.
func (r *Runtime) sharePull(ctx context.Context, name string, pull func(context.Context) error) error {
	for {
		p, joined := r.joinPull(ctx, name, pull)
		var err error
		select {
		case <-p.done:
			err = p.err
		case <-ctx.Done():
			err = ctx.Err()
		}
		if joined {
			r.leavePull(p)
		}
		if joined || ctx.Err() != nil {
			return err
		}
	}
}

// joinPull returns the pull under way or a new one. One that is being cancelled cannot be joined: the caller waits for
// its end and calls again.
func (r *Runtime) joinPull(ctx context.Context, name string, pull func(context.Context) error,
) (p *sharedPull, joined bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.pulls[name]; p != nil {
		if p.callers == 0 {
			return p, false
		}
		p.callers++
		return p, true
	}
	// It has its own time limit, so that the first caller's cancellation does not fail the others.
	pulling, cancel := context.WithTimeout(context.WithoutCancel(ctx), pullTimeout)
	p = &sharedPull{done: make(chan struct{}), callers: 1, cancel: cancel}
	r.pulls[name] = p
	go func() {
		defer cancel()
		p.err = pull(pulling)
		r.mu.Lock()
		delete(r.pulls, name)
		r.mu.Unlock()
		close(p.done)
	}()
	return p, true
}

func (r *Runtime) leavePull(p *sharedPull) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.callers--; p.callers == 0 {
		p.cancel()
	}
}

// Package swarm is thousands of simulated nodes in one process, and how a benchmark commands that process. A node of it
// enrolls, dials, says hello, verifies and accepts its desired state, reports its workloads as ready at once, and
// uploads usage that it sealed and signed, as an agent does (agent/hubsession); it has no containers, no disk and no
// clock of its own.
package swarm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// Command is one line to the process; exactly one field is set.
type Command struct {
	Enroll  *Enroll  `json:"enroll,omitempty"`
	Connect *Connect `json:"connect,omitempty"`
	Back    *Back    `json:"back,omitempty"`
	Seal    *Seal    `json:"seal,omitempty"`
	Upload  *Upload  `json:"upload,omitempty"`
	Live    *Live    `json:"live,omitempty"`
}

// Enroll lets a new node in for each token.
type Enroll struct {
	APIURL          string   `json:"api_url"`
	RootFingerprint string   `json:"root_fingerprint"`
	Tokens          []string `json:"tokens"`
}

// Connect has the first nodes, and no others, open sessions and keep them; it is done when each has accepted a state
// with Workloads, or more. Sessions that are opened from then on have this round-trip time; 0: that of loopback.
type Connect struct {
	Nodes     int           `json:"nodes"`
	Workloads int           `json:"workloads,omitempty"`
	RTT       time.Duration `json:"rtt,omitempty"`
}

// Back waits until the first nodes hold sessions that were opened after a moment.
type Back struct {
	Nodes int       `json:"nodes"`
	Since time.Time `json:"since"`
}

// Seal has nodes measure a while, without sending it yet: every cut gives one record of each meter for each member, and
// one segment.
type Seal struct {
	// Members are those of the first nodes.
	Members [][]string `json:"members"`
	Meters  []string   `json:"meters"`
	From    time.Time  `json:"from"`
	// Cut is the length of a record, Cuts how many there are.
	Cut  time.Duration `json:"cut"`
	Cuts int           `json:"cuts"`
}

// Upload sends all that was sealed. One segment in RepeatEvery is sent twice.
type Upload struct {
	RepeatEvery int `json:"repeat_every"`
}

// Live has nodes measure and send usage as it arises: each cuts a segment of one record of each meter for each member
// every Every, the nodes one after the other, until For is over. It is done when the hub has acknowledged all.
type Live struct {
	// Members are those of the first nodes.
	Members [][]string    `json:"members"`
	Meters  []string      `json:"meters"`
	Every   time.Duration `json:"every"`
	For     time.Duration `json:"for"`
}

// Reply is one line back.
type Reply struct {
	Error string `json:"error,omitempty"`
	// NodeIDs are all nodes, in order.
	NodeIDs []string `json:"node_ids,omitempty"`
	// Millis are, of Back, the times since Back.Since at which the nodes were back, in the order of the nodes; of Live,
	// the times from a segment's cut to its acknowledgement.
	Millis []float64 `json:"millis,omitempty"`
	// Dials is how many dials that took, Failures why sessions did not come about or ended, and how often.
	Dials    int64            `json:"dials,omitempty"`
	Failures map[string]int64 `json:"failures,omitempty"`
	// Seconds is how long the command took, Records how many distinct records it was about, Repeated how many were sent
	// again.
	Seconds  float64 `json:"seconds"`
	Records  int64   `json:"records,omitempty"`
	Repeated int64   `json:"repeated,omitempty"`
	// Broken is how many nodes could not send their live usage to the end, BrokenBy why one of them could not.
	Broken   int    `json:"broken,omitempty"`
	BrokenBy string `json:"broken_by,omitempty"`
}

// Swarm is the process, seen from the benchmark.
type Swarm struct {
	PID int

	cmd     *exec.Cmd
	in      io.WriteCloser
	replies chan Reply
	ended   chan struct{}
	err     error
}

// Start runs the program at path. What it complains of goes to logPath.
func Start(path, logPath string) (*Swarm, error) {
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(path)
	cmd.Stderr = log
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := &Swarm{PID: cmd.Process.Pid, cmd: cmd, in: in, replies: make(chan Reply, 1), ended: make(chan struct{})}
	go s.listen(out)
	return s, nil
}

func (s *Swarm) listen(out io.Reader) {
	lines := json.NewDecoder(bufio.NewReader(out))
	for {
		var r Reply
		if err := lines.Decode(&r); err != nil {
			break
		}
		s.replies <- r
	}
	s.err = s.cmd.Wait()
	close(s.ended)
}

// Do has one command carried out.
func (s *Swarm) Do(ctx context.Context, c Command) (Reply, error) {
	line, err := json.Marshal(c)
	if err != nil {
		return Reply{}, err
	}
	if _, err := s.in.Write(append(line, '\n')); err != nil {
		return Reply{}, err
	}
	select {
	case r := <-s.replies:
		if r.Error != "" {
			return r, errors.New(r.Error)
		}
		return r, nil
	case <-s.ended:
		return Reply{}, fmt.Errorf("the simulated nodes have ended: %w", errors.Join(s.err, io.ErrUnexpectedEOF))
	case <-ctx.Done():
		return Reply{}, ctx.Err()
	}
}

// Stop ends the process and waits for it.
func (s *Swarm) Stop() error {
	_ = s.in.Close()
	<-s.ended
	return s.err
}

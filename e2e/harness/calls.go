package harness

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

// NodeCalls is how often a node has called its hub, by its log.
type NodeCalls struct {
	Name string
	// Starts are those of the agent and, beyond the first, of the hub: each explains a session.
	Starts int
	// Sessions were welcomed by the hub.
	Sessions int
	// Enrolled counts the enrolments.
	Enrolled int
	// Renewed are the renewals of the certificate. The first after each start is left out: an agent renews once at its
	// start while it doubts its clock.
	Renewed [][]renewal
	// Dials are the times of failed dials and ends of sessions, up to the next session that opens. RetryMax bounds the
	// pauses between them.
	Dials    [][]time.Time
	RetryMax time.Duration
}

// renewal is one of a certificate.
type renewal struct{ at, expires time.Time }

// logLine is what a call leaves in a log.
type logLine struct {
	Time time.Time `json:"time"`
	Msg  string    `json:"msg"`
	// ExpiresAt is that of a new certificate.
	ExpiresAt time.Time `json:"expires_at"`
	// Method, Route and Bytes are those of a request to the hub.
	Method string `json:"method"`
	Route  string `json:"route"`
	Bytes  int64  `json:"response_bytes"`
}

// Pulls compares what the registry has sent with what it has. Both count blobs of at least largeBlob.
type Pulls struct{ SentBytes, StoredBytes int64 }

// largeBlob leaves manifests out, which a node may read for each instance.
const largeBlob = 1 << 20

// pullsOf reads the pulls in the hub's log.
func pullsOf(hub devcluster.HubConfig) (p Pulls, err error) {
	lines, err := readLog(filepath.Join(hub.Dir, "logs", "hub.log"))
	if err != nil {
		return p, err
	}
	for _, l := range lines {
		if l.Msg == "request" && l.Method == http.MethodGet && l.Route == "/v2/" && l.Bytes >= largeBlob {
			p.SentBytes += l.Bytes
		}
	}
	err = filepath.WalkDir(filepath.Join(hub.DataDir(), "registry"), func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return ignoreAbsent(err)
		}
		info, err := d.Info()
		if err == nil && info.Size() >= largeBlob {
			p.StoredBytes += info.Size()
		}
		return ignoreAbsent(err)
	})
	return p, err
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// callsOf reads the calls of an agent in its log.
func callsOf(c devcluster.AgentConfig, hub devcluster.HubConfig) (n NodeCalls, err error) {
	n.Name, n.RetryMax = filepath.Base(c.Dir), hubsession.DefaultDialRetryMax
	if i := slices.Index(c.ExtraArgs, "--dial-retry-max"); i >= 0 {
		if n.RetryMax, err = time.ParseDuration(c.ExtraArgs[i+1]); err != nil {
			return n, err
		}
	}
	lines, err := readLog(filepath.Join(c.Dir, "logs", "agent.log"))
	if err != nil {
		return n, err
	}
	last := func(groups [][]time.Time) *[]time.Time { return &groups[len(groups)-1] }
	n.Dials = [][]time.Time{nil}
	for _, l := range lines {
		switch l.Msg {
		case devcluster.StartMessage:
			n.Starts++
			n.Dials, n.Renewed = append(n.Dials, nil), append(n.Renewed, nil)
		case "session open":
			n.Sessions++
			n.Dials = append(n.Dials, nil)
		case "this store takes a new incarnation": // the pauses start anew
			n.Dials = append(n.Dials, nil)
		case "enrolled":
			n.Enrolled++
		case "certificate renewed":
			in := len(n.Renewed) - 1
			n.Renewed[in] = append(n.Renewed[in], renewal{l.Time, l.ExpiresAt})
		case "no session":
			*last(n.Dials) = append(*last(n.Dials), l.Time)
		}
	}
	lines, err = readLog(filepath.Join(hub.Dir, "logs", "hub.log"))
	hubs := 0
	for _, l := range lines {
		if l.Msg == devcluster.StartMessage {
			hubs++
		}
	}
	n.Starts += max(hubs-1, 0)
	return n, err
}

// readLog reads the lines of a log that are JSON objects. A log that is not there has none.
func readLog(path string) (lines []logLine, err error) {
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	scan := bufio.NewScanner(bytes.NewReader(data))
	scan.Buffer(nil, len(data)+1)
	for scan.Scan() {
		var l logLine
		if json.Unmarshal(scan.Bytes(), &l) == nil {
			lines = append(lines, l)
		}
	}
	return lines, scan.Err()
}

// String is short.
func (n NodeCalls) String() string {
	failed, renewed := 0, 0
	for _, dials := range n.Dials {
		failed += len(dials)
	}
	for _, renewals := range n.Renewed {
		renewed += len(renewals)
	}
	return fmt.Sprintf("%s: %d starts, %d sessions, %d enrolled, %d renewed, %d ended", n.Name, n.Starts, n.Sessions,
		n.Enrolled, renewed, failed)
}

// renewalResolution is that of the times in certificates.
const renewalResolution = time.Second

// findings are the calls of one node that no fault explains: dials in shorter pauses than those of the backoff, which
// double up to the longest, and renewals of certificates before half of their life is over.
func (n NodeCalls) findings() (lines []string) {
	for _, dials := range n.Dials {
		least := hubsession.DialRetryMin / 2
		for i := 1; i < len(dials); i++ {
			if pause := dials[i].Sub(dials[i-1]); pause < least {
				lines = append(lines, fmt.Sprintf("node %s dials again after %s, its pause is %s at least", n.Name, pause,
					least))
			}
			least = min(2*least, max(n.RetryMax, hubsession.DialRetryMin)/2)
		}
	}
	for _, renewals := range n.Renewed {
		for i := 1; i < len(renewals); i++ {
			life, old := renewals[i-1].expires.Sub(renewals[i-1].at), renewals[i].at.Sub(renewals[i-1].at)
			if old < life/2-renewalResolution {
				lines = append(lines, fmt.Sprintf("node %s renews a certificate for %s after %s", n.Name, life, old))
			}
		}
	}
	return lines
}

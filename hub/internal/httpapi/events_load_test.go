package httpapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/pkg/loop"
)

// sequence numbers events and gives them to readers as a hub does, until the test ends.
func (h *house) sequence(t *testing.T) {
	t.Helper()
	s := &event.Sequencer{DB: h.d, Holder: "hub", Now: h.clock}
	log := slog.New(slog.DiscardHandler)
	number := loop.New("sequencer", time.Second, func(ctx context.Context) error {
		_, err := s.Number(ctx)
		return err
	}, log)
	follow := loop.New("events", time.Second, h.tail.Pass, log)
	h.d.OnCommit(event.AppendedQueue, func(string) { number.Wake() })
	h.d.OnCommit(event.NumberedQueue, func(string) { follow.Wake() })
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, l := range []*loop.Loop{number, follow} {
		running.Go(func() { _ = l.Run(ctx) })
	}
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}

// TestASlowFollowerHarmsNoOther has one client that reads nothing beside followers of events and watchers of a node. It
// ends only when each of the others has had everything; bench/README.md has the row with 1,000 of each.
func TestASlowFollowerHarmsNoOther(t *testing.T) {
	const users, clientsEach, count = 2, 20, 100
	s := &theater{house: newHouse(t)}
	orgID, _, boss := s.tenant(t, "acme")
	var tokens []string
	for u := range users {
		user := s.must(t, s.admin, "POST", "/admin/users", fmt.Sprint("user-", u), fmt.Sprintf(
			`{"org_id":%q,"email":"u%d@acme.example","display_name":"U","roles":["org_member"]}`, orgID, u), 201).text("id")
		tokens = append(tokens, s.must(t, s.admin, "POST", "/admin/users/"+user+"/tokens", fmt.Sprint("token-", u), `{}`,
			201).text("token"))
	}
	s.open(t)
	s.sequence(t)
	server := httptest.NewServer(s.unchecked)
	t.Cleanup(server.CloseClientConnections)

	get := func(token, path string) (*http.Response, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/api/v1"+path, nil)
		if err != nil {
			return nil, err
		}
		r.Header.Set("Authorization", "Bearer "+token)
		return server.Client().Do(r)
	}
	slow, err := net.Dial("tcp", strings.TrimPrefix(server.URL, "http://"))
	require.NoError(t, err)
	defer func() { _ = slow.Close() }()
	require.NoError(t, slow.(*net.TCPConn).SetReadBuffer(4096))
	_, err = fmt.Fprintf(slow, "GET /api/v1/events?follow=true HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer %s\r\n\r\n",
		boss)
	require.NoError(t, err)

	var all sync.WaitGroup
	for _, token := range tokens {
		for range clientsEach {
			res, err := get(token, "/events?follow=true&type=apps.environment")
			require.NoError(t, err)
			all.Go(func() { assert.NoError(t, readSubjects(res, count)) })
			all.Go(func() {
				assert.NoError(t, watchUntilDraining(func(version int64) (*http.Response, error) {
					return get(s.admin, fmt.Sprintf("/admin/nodes/%s?after=%d&wait=30s", s.node, version))
				}))
			})
		}
	}
	for i := range count {
		require.NoError(t, db.WriteTx(t.Context(), s.d, func(tx db.Tx) error {
			return event.Append(t.Context(), tx, event.Event{
				Type: "apps.environment.removed", Subject: fmt.Sprint("s", i), OrgID: orgID, ResourceVersion: 1, At: s.clock(),
				Data: map[string]any{"text": strings.Repeat("x", 60<<10)},
			})
		}))
	}
	s.must(t, s.admin, "POST", "/admin/nodes/"+s.node+"/drain", "drain", "", 200)
	all.Wait()
}

// readSubjects reads a stream until it has had the events of s0, s1 and so on, in this order.
func readSubjects(res *http.Response, count int) error {
	defer func() { _ = res.Body.Close() }()
	lines := bufio.NewReaderSize(res.Body, 1<<20)
	for next := 0; next < count; {
		line, err := lines.ReadString('\n')
		if err != nil {
			return err
		}
		if !strings.HasPrefix(line, "data: ") {
			continue
		}
		if !strings.Contains(line, fmt.Sprintf(`"subject":"s%d"`, next)) {
			return fmt.Errorf("event %d is another one", next)
		}
		next++
	}
	return nil
}

// watchUntilDraining waits for each change of a node until it drains.
func watchUntilDraining(get func(version int64) (*http.Response, error)) error {
	node := Node{ResourceVersion: 1}
	for node.Status != NodeStatusDraining {
		res, err := get(node.ResourceVersion)
		if err != nil {
			return err
		}
		if err := errors.Join(json.NewDecoder(res.Body).Decode(&node), res.Body.Close()); err != nil {
			return err
		}
	}
	return nil
}

package httpapi

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/duplex"
)

// shouter answers with what it got, in upper case, once its caller has ended.
func shouter(t *testing.T) func(context.Context) (duplex.Stream, error) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				text, err := io.ReadAll(conn)
				if err == nil {
					_, _ = io.WriteString(conn, strings.ToUpper(string(text)))
				}
			}()
		}
	}()
	return func(ctx context.Context) (duplex.Stream, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp4", l.Addr().String())
		if err != nil {
			return nil, err
		}
		s := duplex.TCP(conn.(*net.TCPConn))
		context.AfterFunc(ctx, s.Abort)
		return s, nil
	}
}

// openPort asks the hub for a stream and returns the connection after the answer's header.
func openPort(t *testing.T, hub *httptest.Server, bearer string, i instance.Instance, port string) (*net.TCPConn,
	*bufio.Reader, *http.Response,
) {
	t.Helper()
	return openStream(t, hub, bearer, i, "port-forward", `{"port":"`+port+`"}`)
}

// openStream asks for a stream of any kind.
func openStream(t *testing.T, hub *httptest.Server, bearer string, i instance.Instance,
	kind, body string,
) (*net.TCPConn, *bufio.Reader, *http.Response) {
	t.Helper()
	conn, err := net.Dial("tcp4", hub.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = fmt.Fprintf(conn, "POST /api/v1/projects/%s/app-instances/%s/%s HTTP/1.1\r\nHost: hub\r\n"+
		"Authorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: Upgrade\r\n"+
		"Upgrade: gpuaas-stream\r\n\r\n%s", i.ProjectID, i.ID, kind, bearer, len(body), body)
	require.NoError(t, err)
	r := bufio.NewReader(conn)
	res, err := http.ReadResponse(r, nil)
	require.NoError(t, err)
	return conn.(*net.TCPConn), r, res
}

// forwarded is a running instance behind a served hub.
func forwarded(t *testing.T) (*theater, *httptest.Server, instance.Instance, string, string) {
	t.Helper()
	s := &theater{house: newHouse(t), logCheckEvery: time.Millisecond}
	orgID, projectID, boss := s.tenant(t, "acme")
	hub, i, stranger := s.forward(t, orgID, projectID, boss)
	return s, hub, i, boss, stranger
}

// forward serves a running instance of the project.
func (s *theater) forward(t *testing.T, orgID, projectID, boss string) (*httptest.Server, instance.Instance, string) {
	t.Helper()
	_, _, stranger := s.tenant(t, "other")
	s.open(t)
	s.ports = map[string]func(context.Context) (duplex.Stream, error){"http": shouter(t)}
	allocation := s.must(t, boss, "POST", "/projects/"+projectID+"/allocations", "k1", sliceBody, 201).text("id")
	hub := httptest.NewServer(s.direct)
	t.Cleanup(hub.Close)
	return hub, s.instance(t, orgID, projectID, allocation), stranger
}

// rowsOf waits for the given number of audit rows about the instance's streams.
func (s *theater) rowsOf(t *testing.T, i instance.Instance, n int) (rows []event.AuditRow) {
	t.Helper()
	require.Eventually(t, func() bool {
		rows = nil
		s.tx(t, func(ctx context.Context, tx db.Tx) error {
			all, err := event.AuditOf(ctx, tx, "app_instance", i.ID, event.MaxPage)
			for _, r := range all {
				if strings.HasSuffix(r.Action, "connect") || strings.Contains(r.Action, "exec") ||
					strings.Contains(r.Action, "copy") {
					rows = append(rows, r)
				}
			}
			return err
		})
		return len(rows) >= n
	}, time.Minute, time.Millisecond)
	return rows
}

func TestAPortIsReachedThroughTheHubAndAudited(t *testing.T) {
	s, hub, i, boss, _ := forwarded(t)
	conn, r, res := openPort(t, hub, boss, i, "http")
	require.Equal(t, http.StatusSwitchingProtocols, res.StatusCode)
	require.NotEmpty(t, res.Header.Get("X-Request-ID"))
	_, err := io.WriteString(conn, "question")
	require.NoError(t, err)
	require.NoError(t, conn.CloseWrite())
	answer, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, "QUESTION", string(answer), "each direction ends on its own")

	rows := s.rowsOf(t, i, 2)
	require.Equal(t, "apps.instance.connect", rows[0].Action)
	require.Equal(t, "apps.instance.disconnect", rows[1].Action)
	for _, row := range rows {
		require.Equal(t, res.Header.Get("X-Request-ID"), row.CorrelationID)
		require.NotEmpty(t, row.Actor.ID)
		require.Equal(t, i.OrgID, row.OrgID)
	}
	raw, err := json.Marshal(rows[1].After)
	require.NoError(t, err)
	require.JSONEq(t, `{"port":"http","member_id":"`+i.Members[0].ID+`","bytes_to_app":8,"bytes_from_app":8}`, string(raw))
}

func TestAPortStreamEndsWithTheRightToIt(t *testing.T) {
	for name, end := range map[string]struct {
		sql  string
		code string
	}{
		"token revoked": {
			`UPDATE user_tokens SET revoked_at = $1 WHERE user_id IN (SELECT id FROM users WHERE email LIKE 'boss@%')`,
			"unauthenticated",
		},
		"role taken":     {`DELETE FROM role_bindings WHERE created_at <= $1`, "not_found"},
		"member removed": {`UPDATE instance_members SET removed_at = $1`, "member_removed"},
	} {
		t.Run(name, func(t *testing.T) {
			s, hub, i, boss, _ := forwarded(t)
			conn, r, res := openPort(t, hub, boss, i, "http")
			require.Equal(t, http.StatusSwitchingProtocols, res.StatusCode)
			_, err := io.WriteString(conn, "half a question")
			require.NoError(t, err)
			s.tx(t, func(ctx context.Context, tx db.Tx) error {
				_, err := tx.Exec(ctx, end.sql, s.clock())
				return err
			})
			_, err = r.ReadByte()
			require.ErrorContains(t, err, "reset", "the end is not taken for the end of the data")
			raw, err := json.Marshal(s.rowsOf(t, i, 2)[1].After)
			require.NoError(t, err)
			require.Contains(t, string(raw), end.code)
		})
	}
}

func TestAPortThatCannotBeReachedIsRefusedAtOnce(t *testing.T) {
	s, hub, i, boss, stranger := forwarded(t)
	path := "/projects/" + i.ProjectID + "/app-instances/"
	foreign := s.ask(t, stranger, "POST", path+i.ID+"/port-forward", "", `{"port":"http"}`)
	nothing := s.ask(t, stranger, "POST", path+db.NewID()+"/port-forward", "", `{"port":"http"}`)
	require.Equal(t, 404, foreign.status, "law 10")
	require.JSONEq(t, nothing.raw, foreign.raw)
	require.Equal(t, "upgrade_missing", s.must(t, boss, "POST", path+i.ID+"/port-forward", "", `{"port":"http"}`,
		400).text("code"))
	code := func(port string) string {
		_, _, res := openPort(t, hub, boss, i, port)
		var p Problem
		require.NoError(t, json.NewDecoder(res.Body).Decode(&p))
		return fmt.Sprint(res.StatusCode, " ", p.Code)
	}
	require.Equal(t, "409 port_unknown", code("ssh"))
	s.ports = nil
	require.Equal(t, "503 node_unreachable", code("http"))
	require.Empty(t, s.rowsOf(t, i, 0), "no stream, no row of one")
}

func TestACommandIsAuditedByItsFirstWordOnly(t *testing.T) {
	s, hub, i, boss, stranger := forwarded(t)
	conn, r, res := openStream(t, hub, boss, i, "exec", `{"command":["login","-password","xyzzy"],"terminal":true}`)
	require.Equal(t, http.StatusSwitchingProtocols, res.StatusCode)
	_, err := io.WriteString(conn, "frames")
	require.NoError(t, err)
	require.NoError(t, conn.CloseWrite())
	answer, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, "FRAMES", string(answer), "the hub passes on what it does not read")
	require.Equal(t, []string{"login", "-password", "xyzzy"}, s.executed[0].GetCommand())
	require.Equal(t, i.Members[0].ID, s.executed[0].GetMemberId())
	for n, row := range s.rowsOf(t, i, 2) {
		require.Equal(t, []string{"apps.instance.exec", "apps.instance.exec_end"}[n], row.Action)
		raw, err := json.Marshal(row.After)
		require.NoError(t, err)
		require.Contains(t, string(raw), `"login"`)
		require.NotContains(t, string(raw), "xyzzy")
	}
	require.NotContains(t, s.log.String(), "xyzzy")

	_, _, res = openStream(t, hub, stranger, i, "exec", `{"command":["login"]}`)
	require.Equal(t, http.StatusNotFound, res.StatusCode, "law 10")
	require.Len(t, s.executed, 1)
}

func TestACopyIsAuditedWithItsPath(t *testing.T) {
	s, hub, i, boss, stranger := forwarded(t)
	conn, r, res := openStream(t, hub, boss, i, "copy", `{"path":"/data/model","into":true}`)
	require.Equal(t, http.StatusSwitchingProtocols, res.StatusCode)
	_, err := io.WriteString(conn, "frames")
	require.NoError(t, err)
	require.NoError(t, conn.CloseWrite())
	answer, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, "FRAMES", string(answer))
	require.Len(t, s.copied, 1)
	require.Equal(t, "/data/model", s.copied[0].GetPath())
	require.True(t, s.copied[0].GetInto())
	rows := s.rowsOf(t, i, 2)
	require.Equal(t, "apps.instance.copy", rows[0].Action)
	require.Equal(t, "apps.instance.copy_end", rows[1].Action)
	raw, err := json.Marshal(rows[1].After)
	require.NoError(t, err)
	require.Contains(t, string(raw), `"path":"/data/model"`)
	require.Contains(t, string(raw), `"bytes_to_app":6`)

	_, _, res = openStream(t, hub, stranger, i, "copy", `{"path":"/data/model"}`)
	require.Equal(t, http.StatusNotFound, res.StatusCode, "law 10")
	_, _, res = openStream(t, hub, boss, i, "copy", `{"path":"relative"}`)
	require.Equal(t, http.StatusBadRequest, res.StatusCode)
	require.Len(t, s.copied, 1)
}

// abortable is the node's side of a stream.
type abortable struct {
	duplex.Stream
	aborted bool
}

func (a *abortable) Abort() { a.aborted = true }

// Nothing is left open on the node of a stream that its caller never gets.
func TestAStreamThatCannotBeAuditedEndsAtItsNode(t *testing.T) {
	h := newHouse(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	far := &abortable{}
	_, err := appStream{server: &Server{Commands: h.commands}}.open(ctx, func(context.Context) (duplex.Stream, error) {
		return far, nil
	})
	require.Error(t, err)
	require.True(t, far.aborted)
}

package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/bench/swarm"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	idleNodes         = 1000
	reconnectingNodes = 5000
)

// hubRows measure the hub: idle, with idle sessions, while all nodes reconnect, and while all upload usage.
func hubRows() []Row {
	return []Row{
		{Name: "hub-idle", Measure: measureHubIdle},
		{Name: "hub-memory", Measure: measureHubMemory},
		{Name: "hub-reconnect", Measure: measureReconnect},
		{Name: "hub-usage", Measure: measureUsage},
	}
}

// LoadTest is a hub of its own, and simulated nodes in another process.
type LoadTest struct {
	Hub    *devcluster.Hub
	Swarm  *swarm.Swarm
	Tenant *scenario.Tenant
	// Nodes are the ids of the enrolled ones.
	Nodes []string

	dir string
}

// startLoadTest starts both programs and enrolls count nodes, which do not dial yet.
func startLoadTest(ctx context.Context, e *Env, name string, count int) (*LoadTest, error) {
	return startLoadTestOf(ctx, e, e.Bin, name, count)
}

// startLoadTestOf takes the hub's program from bin.
func startLoadTestOf(ctx context.Context, e *Env, bin, name string, count int) (*LoadTest, error) {
	dir, err := e.Dir(name)
	if err != nil {
		return nil, err
	}
	c := &LoadTest{dir: dir}
	// The nodes dial this port, so it stays the same when the hub restarts.
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	conf := devcluster.HubConfig{Bin: bin, Dir: dir, Listen: "127.0.0.1:0", SessionListen: port}
	if c.Hub, err = devcluster.NewHub(ctx, conf, trustDomain); err != nil {
		return nil, err
	}
	e.Defer(func() error { return c.Hub.Stop() })
	if c.Tenant, err = scenario.NewTenant(ctx, c.Hub, filepath.Join(dir, "tenant"), "swarm", "1000000"); err != nil {
		return nil, err
	}
	program := filepath.Join(dir, "nodes")
	if err := devcluster.Build(ctx, e.Source, "./e2e/bench/nodes", program); err != nil {
		return nil, err
	}
	if c.Swarm, err = swarm.Start(program, filepath.Join(dir, "nodes.log")); err != nil {
		return nil, err
	}
	e.Defer(c.Swarm.Stop)
	return c, c.enroll(ctx, count)
}

// end stops both programs, so that the next row has the machine to itself.
func (c *LoadTest) end() error { return errors.Join(c.Swarm.Stop(), c.Hub.Stop()) }

// restartHub ends the hub and starts it anew; it returns when the new one serves.
func (c *LoadTest) restartHub(ctx context.Context) error {
	if err := c.Hub.Stop(); err != nil {
		return err
	}
	if err := c.Hub.Restart(ctx); err != nil {
		return err
	}
	admin, err := scenario.Admin(c.Hub.Ready)
	c.Tenant.Admin = admin
	return err
}

// sql runs statements on the hub's private database, for rows by the thousand that the API creates one by one.
func (c *LoadTest) sql(ctx context.Context, do func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, c.Hub.Config.DatabaseURL())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return do(conn)
}

// enroll enrolls count more nodes. Their tokens are copies of one row with other secrets.
func (c *LoadTest) enroll(ctx context.Context, count int) error {
	one, err := client.Read[client.JoinToken](c.Tenant.Admin.CreateJoinToken(ctx, client.JoinTokenCreate{}))
	if err != nil {
		return err
	}
	tokens, ids, digests := make([]string, count), make([]uuid.UUID, count), make([][]byte, count)
	for i := range count {
		tokens[i], ids[i] = rand.Text(), uuid.New()
		sum := sha256.Sum256([]byte(tokens[i]))
		digests[i] = sum[:]
	}
	err = c.sql(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx,
			`INSERT INTO join_tokens SELECT (jsonb_populate_record(t, jsonb_build_object('id', x.id, 'secret_sha256',
				x.digest::text))).*
			FROM join_tokens t, unnest($1::uuid[], $2::bytea[]) AS x(id, digest) WHERE t.id = $3`, ids, digests, one.ID)
		return err
	})
	if err != nil {
		return fmt.Errorf("join tokens: %w", err)
	}
	r, err := c.Swarm.Do(ctx, swarm.Command{Enroll: &swarm.Enroll{
		APIURL:          c.Hub.Ready.APIURL,
		RootFingerprint: c.Hub.RootFingerprint, Tokens: tokens,
	}})
	c.Nodes = r.NodeIDs
	return err
}

func (c *LoadTest) connect(ctx context.Context, nodes int) (swarm.Reply, error) {
	return c.Swarm.Do(ctx, swarm.Command{Connect: &swarm.Connect{Nodes: nodes}})
}

// measureHubIdle measures a hub with one idle node.
func measureHubIdle(ctx context.Context, e *Env) (results []Result, err error) {
	c, err := startLoadTest(ctx, e, "hub-idle", 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.end()) }()
	if _, err := c.connect(ctx, 1); err != nil {
		return nil, err
	}
	idle, err := MeasureIdle(ctx, e, c.Hub.PID)
	if err != nil {
		return nil, err
	}
	r := Result{
		Name: "hub-idle", What: "hub, idle with one node: RSS", Unit: "MB", Target: "≤ 100", Reached: idle.RSSMB <= 100,
		Parts: []Part{{Name: "CPU in % of a core", Value: idle.CPUPercent}},
		Note:  "without PostgreSQL; mapped files included",
	}
	return []Result{r.single(idle.RSSMB)}, nil
}

// measureHubMemory compares a hub without sessions with one that holds many idle ones.
func measureHubMemory(ctx context.Context, e *Env) (results []Result, err error) {
	const maxKB = 150
	nodes := e.Samples(idleNodes)
	c, err := startLoadTest(ctx, e, "hub-memory", nodes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.end()) }()
	// Memory that enrollment used does not belong to a session.
	if err := c.restartHub(ctx); err != nil {
		return nil, err
	}
	alone, err := MeasureIdle(ctx, e, c.Hub.PID)
	if err != nil {
		return nil, err
	}
	if _, err := c.connect(ctx, nodes); err != nil {
		return nil, err
	}
	loaded, err := MeasureIdle(ctx, e, c.Hub.PID)
	if err != nil {
		return nil, err
	}
	perNode := (loaded.RSSMB - alone.RSSMB) * 1000 / float64(nodes)
	r := Result{
		Name: "hub-memory", What: fmt.Sprintf("hub memory per idle node, %d of them", nodes), Unit: "KB",
		Target: fmt.Sprintf("≤ %d", maxKB), Reached: perNode <= maxKB,
		Parts: []Part{
			{Name: "RSS with none, MB", Value: alone.RSSMB},
			{Name: "RSS with all, MB", Value: loaded.RSSMB},
			{Name: "CPU with all, % of a core", Value: loaded.CPUPercent},
		},
		Note: "bare quic-go: 75–96 KB. Enrolled certificates, control and usage stream open, state accepted, a report " +
			"every 30 s, at least 60 s idle",
	}
	return []Result{r.single(perNode)}, nil
}

// apiPause is the pause between two calls of a prober while nodes reconnect.
const apiPause = 50 * time.Millisecond

// measureReconnect restarts the hub under its nodes and calls the API meanwhile.
func measureReconnect(ctx context.Context, e *Env) (results []Result, err error) {
	const maxSeconds, maxMillis = 20, 200
	nodes := e.Samples(reconnectingNodes)
	c, err := startLoadTest(ctx, e, "hub-reconnect", nodes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.end()) }()
	first, err := c.connect(ctx, nodes)
	if err != nil {
		return nil, err
	}
	stopped := time.Now()
	if err := c.restartHub(ctx); err != nil {
		return nil, err
	}
	serving := time.Now()
	before, err := c.cpu()
	if err != nil {
		return nil, err
	}
	calls, stop := c.callAPI(ctx, []*client.Hub{c.Tenant.Admin, c.Tenant.Admin}, apiPause)
	back, err := c.Swarm.Do(ctx, swarm.Command{Back: &swarm.Back{Nodes: nodes, Since: serving}})
	stop()
	if err != nil {
		return nil, err
	}
	after, err := c.cpu()
	if err != nil {
		return nil, err
	}
	api, err := calls()
	if err != nil {
		return nil, err
	}
	var times Samples
	for _, ms := range back.Millis {
		times = append(times, ms/1000)
	}
	all := times.P(100)
	r := Result{
		Name: "hub-reconnect.nodes", What: fmt.Sprintf("%d nodes reconnecting after a hub restart: all back", nodes),
		Unit:   "s",
		Target: fmt.Sprintf("≤ %d", maxSeconds), Reached: all <= maxSeconds,
		Parts: []Part{
			{Name: "half back after", Value: times.P50()},
			{Name: "99 % back after", Value: times.P(99)},
			{Name: "hub was away", Value: serving.Sub(stopped).Seconds()},
			{Name: "first connection of all took", Value: first.Seconds},
			{Name: "dials per node", Value: float64(back.Dials) / float64(nodes)},
			{Name: "hub core-s", Value: (after[0] - before[0]).Seconds()},
			{Name: "PostgreSQL core-s", Value: (after[1] - before[1]).Seconds()},
			{Name: "simulated nodes core-s", Value: (after[2] - before[2]).Seconds()},
		},
		Note: "counted from the hub's ready line; hub, PostgreSQL and all simulated nodes share the machine; backoff and " +
			"jitter as the agent's after sessions of hours; ends of dials and sessions: " +
			ends(back.Failures) + "; at first: " + ends(first.Failures),
	}
	a := Result{
		Name: "hub-reconnect.api", What: "API meanwhile (three reads to one write)", Unit: "ms",
		Target: fmt.Sprintf("p99 ≤ %d", maxMillis), Reached: api.P99() <= maxMillis,
	}
	return []Result{r.single(all), api.Into(a)}, nil
}

// ends lists the reasons why dials and sessions ended, with their counts.
func ends(failures map[string]int64) string {
	var out []string
	for _, reason := range slices.Sorted(maps.Keys(failures)) {
		out = append(out, fmt.Sprintf("%s %d", reason, failures[reason]))
	}
	return strings.Join(out, ", ")
}

// freePort returns an unused UDP address on loopback.
func freePort() (string, error) {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return "", err
	}
	addr := conn.LocalAddr().String()
	return addr, conn.Close()
}

// databaseCPU is what all processes of the hub's PostgreSQL have used.
func (c *LoadTest) databaseCPU() (time.Duration, error) {
	pids, err := c.databasePIDs()
	if err != nil {
		return 0, err
	}
	total, err := cpuTime(pids[0])
	for _, pid := range pids[1:] {
		// A process that has ended since is left out.
		if used, err := cpuTime(pid); err == nil {
			total += used
		}
	}
	return total, err
}

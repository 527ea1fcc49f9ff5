package httpapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/db"
)

const (
	// fewNearMisses are sent where GPUAAS_NEAR_MISSES names no number; make near-miss sends many.
	fewNearMisses  = 3000
	nearMissCaller = 4
	// maxHeapGrowth is what may lie in the heap after all requests that did not after the first tenth.
	maxHeapGrowth = 8 << 20
)

// TestNearMissesAreRefusedAndHarmless sends requests that almost follow the contract to a hub behind a real listener:
// none is answered 5xx, none panics, no answer has a byte of another org, and the heap does not grow.
func TestNearMissesAreRefusedAndHarmless(t *testing.T) {
	total := fewNearMisses
	if text := os.Getenv("GPUAAS_NEAR_MISSES"); text != "" {
		var err error
		total, err = strconv.Atoi(text)
		require.NoError(t, err)
	}
	m := newMisses(t)
	m.send(t, total/10)
	before := heap()
	m.send(t, total-total/10)
	m.client.CloseIdleConnections()
	after := heap()
	require.Zero(t, m.panics.Load())
	require.Less(t, after, before+maxHeapGrowth)
	t.Logf("%d requests; heap %d KiB after a tenth, %d KiB at the end; answers by status: %v", total, before>>10,
		after>>10, m.counts)
	require.Greater(t, m.counts[http.StatusBadRequest], total/10, "the requests reach the checks")
	require.NotZero(t, m.counts[http.StatusNotFound])
	require.NotZero(t, m.counts[http.StatusMethodNotAllowed])
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// misses sends near misses and judges the answers.
type misses struct {
	*stage
	url        string
	client     *http.Client
	operations []*operation
	good       map[string]string
	// foreign are ids of the other org, for requests.
	foreign []string
	panics  atomic.Int64
	seed    uint64
	mu      sync.Mutex
	counts  map[int]int
}

// Write counts the panics among the lines of the log.
func (m *misses) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte(`"msg":"panic"`)) {
		m.panics.Add(1)
	}
	return len(line), nil
}

func newMisses(t *testing.T) *misses {
	t.Helper()
	m := &misses{
		stage: newStage(t), client: &http.Client{Timeout: time.Minute}, good: samples(), counts: map[int]int{},
	}
	for _, id := range []string{"allocation_id", "volume_id", "project_id", "org_id"} {
		m.foreign = append(m.foreign, m.strange[id])
	}
	operations, err := loadContract(hubapi.OpenAPI)
	require.NoError(t, err)
	for _, key := range slices.Sorted(maps.Keys(operations)) {
		m.operations = append(m.operations, operations[key])
	}
	server := httptest.NewServer(m.handler(t, m))
	t.Cleanup(server.Close)
	m.url = server.URL
	return m
}

func (m *misses) send(t *testing.T, n int) {
	t.Helper()
	var all sync.WaitGroup
	for caller := range nearMissCaller {
		m.seed++
		source := rand.New(rand.NewPCG(m.seed, 1)) // the same requests each time
		all.Go(func() {
			for i := caller; i < n && !t.Failed(); i += nearMissCaller {
				m.one(t, source)
			}
		})
	}
	all.Wait()
}

func (m *misses) one(t *testing.T, source *rand.Rand) {
	m.wait(50 * time.Millisecond) // what is refused unread is charged to the address
	op := m.operations[source.IntN(len(m.operations))]
	miss := m.make(op, source)
	r, err := http.NewRequestWithContext(t.Context(), miss.method, m.url+miss.path, strings.NewReader(miss.body))
	if err != nil {
		return // not a URL that a client can send
	}
	r.Header = miss.header
	res, err := m.client.Do(r)
	if err != nil {
		t.Errorf("%s %s: %v", miss.method, miss.path, err)
		return
	}
	defer func() { _ = res.Body.Close() }()
	var text []byte
	if strings.HasSuffix(res.Header.Get("Content-Type"), "json") { // a stream has no end
		if text, err = io.ReadAll(res.Body); err != nil {
			t.Errorf("%s: %v", op.id, err)
		}
	}
	m.mu.Lock()
	m.counts[res.StatusCode]++
	m.mu.Unlock()
	if res.StatusCode >= 500 && !stands(op, res.StatusCode) {
		t.Errorf("%s: %s %s %.500s: %d %s", op.id, miss.method, miss.path, miss.body, res.StatusCode, text)
	}
	for _, theirs := range []string{strangeVolume, "@other.example"} { // never sent, in all that shows a resource
		if bytes.Contains(text, []byte(theirs)) {
			t.Errorf("%s: %s %s shows what is another org's: %s", op.id, miss.method, miss.path, text)
		}
	}
}

// stands reports whether an answer is right although it is 5xx: nothing runs behind the node's streams here.
func stands(op *operation, status int) bool {
	return status == http.StatusServiceUnavailable && strings.Contains(op.template, "/{app_instance_id}/")
}

type miss struct {
	method, path, body string
	header             http.Header
}

// make returns a good request with one to three faults.
func (m *misses) make(op *operation, source *rand.Rand) miss {
	filled := pathParameter.ReplaceAllStringFunc(op.template, func(name string) string {
		return m.ids[strings.Trim(name, "{}")]
	})
	r := miss{method: op.method, path: basePath + filled, body: m.good[op.id], header: http.Header{
		"Authorization": {"Bearer " + m.boss}, "X-Idempotency-Key": {db.NewID()}, "Content-Type": {"application/json"},
	}}
	for range 1 + source.IntN(3) {
		switch kind := source.IntN(10); {
		case kind < 3:
			m.breakPath(&r, source)
		case kind < 4:
			m.breakQuery(&r, op, source)
		case kind < 5:
			breakHeader(&r, source)
		case kind < 6 && source.IntN(4) == 0:
			r.method = pick(source, "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "NONSENSE")
		default:
			m.breakBody(&r, source)
		}
	}
	return r
}

func pick[T any](source *rand.Rand, from ...T) T { return from[source.IntN(len(from))] }

var anyID = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}`)

func (m *misses) breakPath(r *miss, source *rand.Rand) {
	if source.IntN(3) > 0 { // an id of the right form that is another's, or nobody's
		ids := anyID.FindAllStringIndex(r.path, -1)
		if len(ids) > 0 {
			at := pick(source, ids...)
			other := pick(source, append(slices.Clone(m.foreign), someID, m.ids["project_id"], m.ids["org_id"])...)
			r.path = r.path[:at[0]] + other + r.path[at[1]:]
			return
		}
	}
	segments := strings.Split(r.path, "/")
	at := 3 + source.IntN(max(1, len(segments)-3))
	if at < len(segments) {
		segments[at] = pick(source, "", ".", "..", "%2e%2e", "%00", "%ff", "a%20b", "%F0%9F%92%A9", strings.Repeat("x", 3000),
			"0", "-1", "null", "'", "%25s%25n", "%2F", segments[at]+"x", strings.ToUpper(segments[at]))
	}
	r.path = strings.Join(segments, "/")
}

func (m *misses) breakQuery(r *miss, op *operation, source *rand.Rand) {
	names := []string{"surprise", "limit", "cursor", "after", "org_id", "project_id"}
	for _, p := range op.params {
		if p.in == "query" {
			names = append(names, p.name, p.name, p.name)
		}
	}
	values := append(slices.Clone(m.foreign), "", "0", "-1", "1", "1.5", "1e9", "99999999999999999999", "true", "null",
		"%00", "%ff%fe",
		"%zz", ";", "a=b", "2026-01-01", "9999-12-31T23:59:59Z", "0000-01-01T00:00:00Z", "2026-01-01T00:00:00%2B99:99",
		strings.Repeat("x", 5000), someID, m.ids["project_id"], "running", "[]", "{}", "'%20OR%201=1--")
	sign := "?"
	if strings.Contains(r.path, "?") {
		sign = "&"
	}
	r.path += sign + pick(source, names...) + "=" + pick(source, values...)
}

func breakHeader(r *miss, source *rand.Rand) {
	names := []string{
		"Authorization", "Content-Type", "X-Idempotency-Key", "X-Request-ID", "If-Match", "If-None-Match",
		"Accept", "Last-Event-ID", "Traceparent", "Content-Encoding", "Range", "Upgrade", "Connection", "Expect",
	}
	name := pick(source, names...)
	value := pick(source, "", "x", "*", `"1"`, `W/"1"`, `""`, `"`, "a, b", strings.Repeat("x", 4000), "text/plain", "gzip",
		"Bearer", "Bearer x", "Basic eDp5", "application/json; charset=latin1", "bytes=0-1", "\xff\xfe", "websocket",
		"00-"+hex64[:32]+"-"+hex64[:16]+"-01", "-1", someID)
	if name == "Expect" && value != "x" {
		return
	}
	switch source.IntN(3) {
	case 0:
		r.header.Del(name)
	case 1:
		r.header.Add(name, value)
	default:
		r.header.Set(name, value)
	}
}

// breakBody changes one value of the body, deep inside as well, or its text.
func (m *misses) breakBody(r *miss, source *rand.Rand) {
	var body any
	if json.Unmarshal([]byte(r.body), &body) != nil || source.IntN(8) == 0 {
		cut := source.IntN(len(r.body) + 1)
		r.body = pick(source, r.body[:cut], r.body+r.body, "[]", "null", "{", `{"a":1,"a":2}`, "\xff",
			strings.Repeat("[", 5000),
			`{"x":`+strings.Repeat("9", 400)+`}`, "["+r.body+"]", strings.Replace(r.body, "{", `{"surprise":1,`, 1),
			strings.Replace(r.body, `"`, `"\u0000`, 1), strings.Replace(r.body, ",", ",,", 1))
		return
	}
	text, err := json.Marshal(m.broken(body, source))
	if err == nil {
		r.body = string(text)
	}
}

func (m *misses) broken(value any, source *rand.Rand) any {
	switch v := value.(type) {
	case map[string]any:
		keys := slices.Sorted(maps.Keys(v))
		if len(keys) == 0 || source.IntN(8) == 0 {
			v["surprise"] = 1
			return v
		}
		key := pick(source, keys...)
		if source.IntN(5) == 0 {
			delete(v, key)
			return v
		}
		v[key] = m.broken(v[key], source)
		return v
	case []any:
		if len(v) > 0 && source.IntN(2) == 0 {
			at := source.IntN(len(v))
			v[at] = m.broken(v[at], source)
			return v
		}
		return pick[any](source, append(v, v...), []any{}, append(v, nil), make([]any, 3000), append(v, someID))
	default:
		return pick[any](source, nil, true, 0, -1, 1, 1.5, 1e300, json.Number("9223372036854775808"), "", "x", "é\u202e💩",
			strings.Repeat("y", 70_000), []any{}, map[string]any{}, someID, m.foreign[0], m.foreign[3], "0", "-0.00", "1e9",
			"999999999999999999999999.99", "NaN", "../../etc/passwd", "9999-12-31T23:59:59Z", "0000-00-00T00:00:00Z",
			"a' OR '1'='1", fmt.Sprint(value)+" ", fmt.Sprint(value)+"x", int64(1)<<62, "<script>", "\n", "sha256:"+hex64)
	}
}

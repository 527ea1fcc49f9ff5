package httpapi

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/stretchr/testify/require"

	hubapi "github.com/gpuaas/gpuaas/hub/api"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/protocol"
)

// leaseEnd is longer than a worker may ask to hold a task without a call.
const leaseEnd = 601 * time.Second

// workerCall is an operation of the API of external workers that would succeed.
type workerCall struct {
	// instance is the path of its instance, rest what follows; other is the same of another instance.
	instance, rest, other string
	body                  string
	// id is the parameter that rest has, if any.
	id string
}

func (c workerCall) reads() bool { return c.rest == "/tasks" }

// TestTheAPIOfExternalWorkersRefusesWhatNobodyMay sends each operation, in a state in which it would succeed, without
// the right to it, about what is not there, and with a request that breaks the contract. In the end each but fail,
// which would end the task before its success, succeeds.
func TestTheAPIOfExternalWorkersRefusesWhatNobodyMay(t *testing.T) {
	s := newWorkshop(t)
	running, deploying := s.launch(t, 2), s.launch(t, 1)
	done := s.finish(t, running, "install", "start")
	held := s.task(t, deploying, "pending")
	s.claim(t, s.worker, held)
	for _, phase := range []string{"install", "start"} {
		s.must(t, s.worker, "POST", held+"/progress", "", `{"attempt":1,"phase":"`+phase+`"}`, 200)
	}
	broken, _ := s.member(t, running, 1)
	first, _ := s.member(t, deploying, 0)
	failed := `{"status":"failed","reason":"device_fault"}`
	s.must(t, s.worker, "POST", broken+"/report", "", failed, 200)

	onTask := func(verb, body string) workerCall {
		return workerCall{
			instance: deploying, rest: strings.TrimPrefix(held, deploying) + verb,
			other: deploying + strings.TrimPrefix(done, running) + verb, body: body, id: "path/task_id",
		}
	}
	onMember := func(verb, body string) workerCall {
		return workerCall{
			instance: running, rest: strings.TrimPrefix(broken, running) + verb,
			other: running + strings.TrimPrefix(first, deploying) + verb, body: body, id: "path/member_id",
		}
	}
	calls := []workerCall{
		{instance: deploying, rest: "/tasks"},
		onTask("/claim", `{"worker":"a"}`),
		onTask("/heartbeat", `{"attempt":1}`),
		onTask("/progress", `{"attempt":1,"phase":"start"}`),
		onTask("/complete", `{"attempt":1}`),
		onMember("/report", failed),
		{instance: running, rest: "/members", body: `{"allocation_id":"` + s.world.Allocation().ID + `"}`},
		onMember("/recover", ""),
	}
	all := append(slices.Clone(calls), onTask("/fail", `{"attempt":1,"reason":"internal"}`), onMember("/remove", ""))
	for _, c := range all {
		s.wait(time.Second) // those without a credential share a budget
		s.refused(t, s.callers(c)...)
		s.refused(t, malformed(c)...)
	}
	for _, c := range calls {
		got := s.try(t, refusal{path: c.instance + c.rest, body: c.body})
		require.Less(t, got.status, 300, "%s: %s", c.rest, got.raw)
	}
	s.finish(t, running, "join")
	s.finish(t, running)
	s.must(t, s.worker, "POST", broken+"/remove", db.NewID(), "", 202)
	s.finish(t, running, "drain", "leave")
}

// callers are refused for who they are, or for what they name.
func (s *workshop) callers(c workerCall) []refusal {
	path := c.instance + c.rest
	list := []refusal{
		{
			why: "no credential", path: path, body: c.body, header: http.Header{"Authorization": nil},
			status: 401, code: "credential_missing", fields: []string{"header/Authorization"},
		},
		{why: "another org's admin", token: s.stranger, path: path, body: c.body, status: 404, code: "not_found"},
		{
			why: "another project of the same org", token: s.boss, path: strings.Replace(path, s.project, s.elsewhere, 1),
			body: c.body, status: 404, code: "not_found",
		},
		{
			why: "an account of another project", path: strings.Replace(path, s.project, s.elsewhere, 1), body: c.body,
			status: 404, code: "not_found",
		},
		{
			why: "no such instance", path: s.project + "/app-instances/" + someID + c.rest, body: c.body,
			status: 404, code: "not_found",
		},
	}
	if !c.reads() {
		list = append(list, refusal{
			why: "a viewer", token: s.viewer, path: path, body: c.body, status: 403, code: "forbidden",
		}, refusal{
			why: "another version", path: path, body: c.body, header: http.Header{"If-Match": {`"another"`}},
			status: 412, code: "etag_stale", fields: []string{"header/If-Match"},
		})
	}
	if c.id == "" {
		return list
	}
	_, verb, _ := strings.Cut(c.rest[1:], "/")
	_, verb, _ = strings.Cut(verb, "/")
	group, _, _ := strings.Cut(c.rest[1:], "/")
	return append(list,
		refusal{why: "of another instance", path: c.other, body: c.body, status: 404, code: "not_found"},
		refusal{
			why: "not there", path: c.instance + "/" + group + "/" + someID + "/" + verb, body: c.body,
			status: 404, code: "not_found",
		},
		refusal{
			why: "no id", path: c.instance + "/" + group + "/x/" + verb, body: c.body,
			status: 400, code: "invalid_request", fields: []string{c.id},
		})
}

// malformed are requests that break the contract, whatever the operation.
func malformed(c workerCall) []refusal {
	path := c.instance + c.rest
	list := []refusal{
		{
			why: "no id", path: strings.Replace(path, c.instance, c.instance[:len(c.instance)-1], 1), body: c.body,
			status: 400, code: "invalid_request", fields: []string{"path/app_instance_id"},
		},
		{
			why: "an unknown parameter", path: path + "?x=1", body: c.body,
			status: 400, code: "invalid_request", fields: []string{"query/x"},
		},
	}
	if c.reads() {
		return list
	}
	large := `{"x":"` + strings.Repeat("x", defaultMaxBodyBytes) + `"}`
	list = append(list, refusal{
		why: "too large", path: path, body: large, status: 413, code: "body_too_large", fields: []string{""},
	})
	if strings.Contains(path, "/members") && !strings.HasSuffix(path, "/report") {
		list = append(list, refusal{
			why: "no key", path: path, body: c.body, header: http.Header{"X-Idempotency-Key": nil},
			status: 400, code: "invalid_request", fields: []string{"header/X-Idempotency-Key"},
		})
	}
	if c.body == "" {
		return append(list, refusal{
			why: "a body", path: path, body: `{"x":1}`, status: 400, code: "invalid_request", fields: []string{""},
		})
	}
	return append(list,
		refusal{why: "no body", path: path, status: 400, code: "body_missing", fields: []string{""}},
		refusal{why: "no JSON", path: path, body: c.body[1:], status: 400, code: "body_not_json", fields: []string{""}},
		refusal{
			why: "no JSON by its header", path: path, body: c.body, header: http.Header{"Content-Type": {"text/plain"}},
			status: 400, code: "content_type_unsupported", fields: []string{"header/Content-Type"},
		},
		refusal{
			why: "an unknown key", path: path, body: `{"x":1,` + c.body[1:], status: 400, code: "invalid_request",
			fields: []string{"/x"},
		})
}

// TestTheAPIOfExternalWorkersRefusesValuesOutOfItsBounds has the bounds of each key and parameter.
func TestTheAPIOfExternalWorkersRefusesValuesOutOfItsBounds(t *testing.T) {
	s := newWorkshop(t)
	i := s.launch(t, 1)
	task := s.task(t, i, "pending")
	s.claim(t, s.worker, task)
	member, _ := s.member(t, i, 0)
	long := strings.Repeat("x", 2049)
	var list []refusal
	bad := func(field, path string, bodies ...string) {
		for _, body := range bodies {
			list = append(list, refusal{
				why: field, path: path, body: body, status: 400, code: "invalid_request", fields: []string{field},
			})
		}
	}
	for _, query := range []string{
		"wait=0s", "wait=31s", "wait=1m", "wait=1", "wait=", "state=held", "limit=0", "limit=201",
	} {
		name, _, _ := strings.Cut(query, "=")
		bad("query/"+name, i+"/tasks?"+query, "")
	}
	list = append(list, refusal{
		why: "cursor", path: i + "/tasks?cursor=x", status: 400, code: "cursor_invalid", fields: []string{"query/cursor"},
	})
	bad("/worker", task+"/claim", `{}`, `{"worker":""}`, `{"worker":"`+long[:129]+`"}`, `{"worker":1}`)
	bad("/lease_seconds", task+"/claim", `{"worker":"a","lease_seconds":4}`, `{"worker":"a","lease_seconds":601}`,
		`{"worker":"a","lease_seconds":"60"}`)
	for verb, rest := range map[string]string{
		"heartbeat": "", "progress": `,"phase":"install"`, "complete": "", "fail": `,"reason":"internal"`,
	} {
		for _, attempt := range []string{"0", "-1", "1.5", `"1"`, "9223372036854775808"} {
			bad("/attempt", task+"/"+verb, `{"attempt":`+attempt+rest+`}`)
		}
		bad("/attempt", task+"/"+verb, "{"+strings.TrimPrefix(rest, ",")+"}")
	}
	bad("/phase", task+"/progress", `{"attempt":1}`, `{"attempt":1,"phase":""}`, `{"attempt":1,"phase":"`+long[:64]+`"}`)
	bad("/detail", task+"/progress", `{"attempt":1,"phase":"install","detail":"`+long+`"}`)
	bad("/detail", task+"/fail", `{"attempt":1,"reason":"internal","detail":"`+long+`"}`)
	bad("/reason", task+"/fail", `{"attempt":1}`)
	bad("/allocation_id", i+"/members", `{"role":"worker"}`, `{"allocation_id":"x"}`)
	bad("/role", i+"/members", `{"allocation_id":"`+someID+`","role":"boss"}`)
	bad("/status", member+"/report", `{}`, `{"status":"starting"}`)
	bad("/detail", member+"/report", `{"status":"ready","detail":"`+long+`"}`)
	for _, reason := range otherReasons(t) {
		bad("/reason", task+"/fail", `{"attempt":1,"reason":"`+reason+`"}`)
		bad("/reason", member+"/report", `{"status":"failed","reason":"`+reason+`"}`)
	}
	s.refused(t, list...)
}

// otherReasons are those of the contract that no worker may give, and one of none; what is left is the code's list.
func otherReasons(t *testing.T) []string {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(hubapi.OpenAPI)
	require.NoError(t, err)
	enum := func(name string) (words []string) {
		for _, v := range doc.Components.Schemas[name].Value.Enum {
			word, _ := v.(string)
			words = append(words, word)
		}
		return words
	}
	mine := enum("WorkerReason")
	var known []string
	for n := range protocol.WorkloadStatus_Reason_name {
		if r := protocol.WorkloadStatus_Reason(n); lifecycle.IsWorkerReason(r) {
			known = append(known, r.Text())
		}
	}
	require.ElementsMatch(t, known, mine)
	others := slices.DeleteFunc(enum("StatusReason"), func(r string) bool { return slices.Contains(mine, r) })
	require.NotEmpty(t, others)
	return append(others, "the_moon", "")
}

// TestOnlyTheHolderOfATaskMovesItOn takes a task from worker to worker and to its ends.
func TestOnlyTheHolderOfATaskMovesItOn(t *testing.T) {
	s := newWorkshop(t)
	i := s.launch(t, 1)
	deploy := s.task(t, i, "pending")
	s.refused(t, fenced("before the claim", s.worker, deploy, 1)...)
	s.claim(t, s.worker, deploy)
	s.refused(t, fenced("an attempt that is not", s.worker, deploy, 2)...)
	s.refused(t, fenced("another account", s.other, deploy, 1)...)
	held := func(token, worker string) refusal {
		return conflict("held", token, deploy+"/claim", `{"worker":"`+worker+`"}`, "task_held")
	}
	order := func(phase string) refusal {
		return conflict("order", s.worker, deploy+"/progress", `{"attempt":1,"phase":"`+phase+`"}`, "task_phase_order",
			"/phase")
	}
	phasesLeft := conflict("phases left", s.worker, deploy+"/complete", `{"attempt":1}`, "task_phase_order")
	s.refused(t, held(s.worker, "b"), held(s.other, "a"), order("start"), order("configure"), phasesLeft)
	s.must(t, s.worker, "POST", deploy+"/progress", "", `{"attempt":1,"phase":"install"}`, 200)
	s.refused(t, order("configure"), phasesLeft)
	s.must(t, s.worker, "POST", deploy+"/progress", "", `{"attempt":1,"phase":"start"}`, 200)
	s.refused(t, order("install"))

	s.wait(leaseEnd)
	require.Equal(t, deploy, s.task(t, i, "pending"))
	s.claim(t, s.other, deploy)
	s.refused(t, fenced("the lease has passed on", s.worker, deploy, 1)...)
	s.refused(t, fenced("the heir's attempt", s.worker, deploy, 2)...)
	s.must(t, s.boss, "POST", i+"/decommission", "end", "", 202)
	end := s.task(t, i, "pending")
	claimEnd := conflict("waits", s.worker, end+"/claim", `{"worker":"a"}`, "task_waits")
	s.refused(t, claimEnd)
	s.must(t, s.other, "POST", deploy+"/fail", "", `{"attempt":2,"reason":"internal"}`, 200)
	s.task(t, i, "cancelled")
	s.refused(t, afterEnd(s.worker, deploy, "claim")...)
	s.refused(t, fenced("the attempt before a cancelled one", s.worker, deploy, 1)...)

	s.claim(t, s.worker, end)
	s.must(t, s.worker, "POST", end+"/fail", "", `{"attempt":1,"reason":"node_unreachable"}`, 200)
	s.refused(t, claimEnd, fenced("it is pending again", s.worker, end, 1)[0])
	s.wait(time.Minute)
	s.claim(t, s.worker, end)
	s.must(t, s.worker, "POST", end+"/complete", "", `{"attempt":2}`, 200)
	s.refused(t, fenced("an attempt before the end", s.worker, end, 1)...)
	for _, r := range afterEnd(s.worker, end, "claim", "heartbeat", "progress", "fail") {
		r.body = strings.Replace(r.body, `"attempt":1`, `"attempt":2`, 1)
		s.refused(t, r)
	}
}

// TestATaskThatFailedIsNotCompletedLater: nor the other way round.
func TestATaskThatFailedIsNotCompletedLater(t *testing.T) {
	s := newWorkshop(t)
	i := s.launch(t, 1)
	deploy := s.task(t, i, "pending")
	s.claim(t, s.worker, deploy)
	s.must(t, s.worker, "POST", deploy+"/fail", "", `{"attempt":1,"reason":"environment_failed"}`, 200)
	s.refused(t, afterEnd(s.worker, deploy, "claim", "heartbeat", "progress", "complete")...)
	s.must(t, s.boss, "POST", i+"/start", "again", "", 202)
	again := s.finish(t, i, "install", "start")
	require.NotEqual(t, deploy, again)
	s.refused(t, afterEnd(s.worker, again, "claim", "heartbeat", "progress", "fail")...)
}

func conflict(why, token, path, body, code string, fields ...string) refusal {
	return refusal{why: why, token: token, path: path, body: body, status: 409, code: code, fields: fields}
}

// taskBodies are good bodies of an attempt.
func taskBodies(attempt string) map[string]string {
	return map[string]string{
		"claim":     `{"worker":"a"}`,
		"heartbeat": `{"attempt":` + attempt + `}`,
		"progress":  `{"attempt":` + attempt + `,"phase":"install"}`,
		"complete":  `{"attempt":` + attempt + `}`,
		"fail":      `{"attempt":` + attempt + `,"reason":"internal"}`,
	}
}

// fenced are the calls of an attempt that does not hold the task.
func fenced(why, token, task string, attempt int) (list []refusal) {
	bodies := taskBodies(strconv.Itoa(attempt))
	for _, verb := range []string{"complete", "heartbeat", "progress", "fail"} {
		list = append(list, conflict(why, token, task+"/"+verb, bodies[verb], "task_fenced", "/attempt"))
	}
	return list
}

// afterEnd are calls of the first attempt after the task's end.
func afterEnd(token, task string, verbs ...string) (list []refusal) {
	for _, verb := range verbs {
		list = append(list, conflict("ended", token, task+"/"+verb, taskBodies("1")[verb], "task_ended"))
	}
	return list
}

// TestMembersChangeOnlyWhereTheVersionAndTheirStateAllowIt has the rules of the state, one after the other.
func TestMembersChangeOnlyWhereTheVersionAndTheirStateAllowIt(t *testing.T) {
	s := newWorkshop(t)
	i := s.launch(t, 2)
	controller, taken := s.member(t, i, 0)
	one, _ := s.member(t, i, 1)
	allocation := s.world.Allocation().ID
	add := `{"allocation_id":"` + allocation + `"}`
	on := func(code, path, body string, fields ...string) refusal {
		return conflict(code, s.worker, path, body, code, fields...)
	}
	ready := `{"status":"ready"}`
	everything := func(code string) []refusal {
		return []refusal{
			on(code, i+"/members", `{"allocation_id":"`+s.world.Allocation().ID+`"}`), on(code, one+"/remove", ""),
			on(code, one+"/recover", ""), on(code, one+"/report", ready),
		}
	}
	s.refused(t, everything("instance_requested")...)
	s.finish(t, i, "install", "start")
	entry := func(code, body, field string, status int) refusal {
		return refusal{why: code, path: i + "/members", body: body, status: status, code: code, fields: []string{field}}
	}
	s.refused(t,
		entry("members_out_of_bounds", `{"allocation_id":"`+allocation+`","role":"head"}`, "/role", 422),
		entry("member_bounds", `{"allocation_id":"`+allocation+`","role":"controller"}`, "/role", 409),
		entry("allocation_unknown", `{"allocation_id":"`+someID+`"}`, "/allocation_id", 422),
		entry("insufficient_capacity", `{"allocation_id":"`+taken+`"}`, "/allocation_id", 409),
		on("member_bounds", controller+"/remove", ""),
		on("member_busy", one+"/recover", ""),
		refusal{
			why: "ready for a reason", path: one + "/report", body: `{"status":"ready","reason":"internal"}`,
			status: 422, code: "reason_unknown", fields: []string{"/reason"},
		},
		refusal{
			why: "failed for none", path: one + "/report", body: `{"status":"failed"}`,
			status: 422, code: "reason_unknown", fields: []string{"/reason"},
		})

	s.must(t, s.worker, "POST", i+"/members", "add", add, 202)
	s.refused(t, refusal{
		why: "the same key", path: i + "/members", body: `{"allocation_id":"` + someID + `"}`,
		header: http.Header{"X-Idempotency-Key": {"add"}}, status: 422, code: "idempotency_key_reused",
		fields: []string{"header/X-Idempotency-Key"},
	})
	last, _ := s.member(t, i, 2)
	s.refused(t, s.busy(last)...)
	s.finish(t, i, "join")
	s.must(t, s.worker, "POST", one+"/remove", "remove", "", 202)
	s.refused(t, s.busy(one)...)
	s.finish(t, i, "drain", "leave")
	for _, path := range []string{one + "/remove", one + "/recover"} {
		s.refused(t, refusal{why: "removed", path: path, status: 404, code: "not_found"})
	}
	s.refused(t, refusal{why: "removed", path: one + "/report", body: ready, status: 404, code: "not_found"})
	s.must(t, s.worker, "POST", last+"/remove", "last", "", 202)
	s.refused(t, on("member_busy", last+"/remove", ""))
	s.must(t, s.boss, "POST", i+"/stop", "stop", "", 202)
	s.refused(t, everything("instance_stopping")...)
}

// busy are the changes of a member that a task is about.
func (s *workshop) busy(member string) []refusal {
	return []refusal{
		conflict("busy", s.worker, member+"/remove", "", "member_busy"),
		conflict("busy", s.worker, member+"/recover", "", "member_busy"),
		conflict("busy", s.worker, member+"/report", `{"status":"ready"}`, "member_busy"),
	}
}

// TestMembersThatTheirNodeRunsAreNotTheWorkers: an app of containers has no tasks, and its nodes alone report it.
func TestMembersThatTheirNodeRunsAreNotTheWorkers(t *testing.T) {
	s := newWorkshop(t)
	i := s.project + "/app-instances/" + s.world.Running().ID
	member, _ := s.member(t, i, 0)
	s.refused(t,
		conflict("add", s.worker, i+"/members", `{"allocation_id":"`+s.world.Allocation().ID+`"}`, "task_unsupported"),
		conflict("remove", s.worker, member+"/remove", "", "task_unsupported"),
		conflict("recover", s.worker, member+"/recover", "", "task_unsupported"),
		conflict("report", s.worker, member+"/report", `{"status":"failed","reason":"internal"}`, "member_of_node"))
	require.Empty(t, items(s.must(t, s.worker, "GET", i+"/tasks", "", "", 200)))
}

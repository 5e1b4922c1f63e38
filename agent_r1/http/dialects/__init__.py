from agent_r1.http.dialects.chat import ChatCompletions
from agent_r1.http.dialects.messages import Messages
from agent_r1.http.dialects.responses import Responses

DIALECTS = (ChatCompletions(), Responses(), Messages())
